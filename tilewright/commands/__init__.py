"""The commands of `tilewright`, a file each. torch and the library are imported inside the functions: `--help` is quick."""
