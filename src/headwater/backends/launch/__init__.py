"""Starting an engine's process, supervising it and replacing it when it dies."""
