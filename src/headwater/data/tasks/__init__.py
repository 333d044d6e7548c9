"""Built-in tasks, one file each; the config name is the file name."""
