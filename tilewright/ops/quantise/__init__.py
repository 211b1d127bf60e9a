"""Numbers to codes and back, and what is done to them on the way."""
