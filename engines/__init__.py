"""Engines that sample faster than the plain loop: compact.py with fast_decoder.py, and vLLM.

They import runtime and dppo. rollout.py and models.py choose one of them.
"""
