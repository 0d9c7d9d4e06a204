"""Engines that sample in place of rollout.py's plain loop: compact.py, hf.py and vllm_engine.py.

May import: engines, runtime, dppo and rollout. models.py and eval.py choose one.
"""
