"""The machinery: knows torch and triton, knows no op."""
