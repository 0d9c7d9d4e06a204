"""Other published prunings, one file each, for comparison. train.py needs none of them."""
