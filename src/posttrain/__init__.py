"""Reinforcement-learning post-training of language, vision-language and diffusion models, as one Hydra application."""

__version__ = "0.1.0"
