"""Engines that sample faster than the plain loop: compact.py with fast_decoder.py, hf.py and vLLM.

May import: engines, runtime, dppo and rollout. models.py and eval.py choose one.
"""
