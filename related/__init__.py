"""Other published prunings, one file each, for comparison. train.py needs none of them.

May import: all but integrations and tests; of bench, how rows are written. Nothing but bench and
tests imports it; the root finds rivals by name.
"""
