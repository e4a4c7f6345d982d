"""What the operations need to be at home in a framework: one module for each, imported by whoever uses it.

Only these modules import a framework. Importing :mod:`ragged_attention` imports none of them.
"""
