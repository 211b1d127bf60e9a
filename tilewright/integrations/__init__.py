"""Adapters to other libraries, over the ops: none is imported before it is asked for."""
