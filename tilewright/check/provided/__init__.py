"""The calls behind the rows of the coverage lists: each is made, on a device, and its result held against float64 truth."""
