"""What the command line's exit status means."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141
"""What a shell shows of a program that SIGPIPE ended."""
