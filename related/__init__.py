"""Other published prunings, one file each, for comparison. train.py needs none of them.

May import: everything but bench, integrations and tests. Nothing but bench and tests imports it;
the root finds rivals by name.
"""
