"""Engines that sample faster than the plain loop: compact.py with fast_decoder.py, and vLLM.

May import: engines, runtime, dppo and rollout. rollout.py, models.py and eval.py choose one.
"""
