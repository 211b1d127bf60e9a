"""The properties every op must have, run on whatever machine this is: by the tests, and by `tilewright check`."""
