"""Connects other trainers, which then train by our plan: Hugging Face's Trainer, Lightning, accelerate.

``planned.py`` is the common part; each other module is the bridge to one library, and needs that library. Bridges use
the public functions of ``api`` and of the trainer, and nothing of the planner.
"""
