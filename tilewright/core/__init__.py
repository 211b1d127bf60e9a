"""What is said: declarations, signatures, formats, chips. It knows torch and Triton, and no operation."""
