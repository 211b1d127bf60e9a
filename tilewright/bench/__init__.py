"""Measuring: how a call is timed, what the memory floor is, which cases there are, and the program that runs them."""
