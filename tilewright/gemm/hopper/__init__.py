"""Products in Gluon for Hopper. Backend `hopper_few` is in `few.py`, and so on; an op's own `hopper` is in the file of its name."""
