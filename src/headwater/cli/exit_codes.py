"""What the command line's exit status means."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
