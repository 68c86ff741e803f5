"""Prediction of the peak memory of a training step, by running the step on tensors without memory."""

from stages.memory.prediction import MemoryPrediction, predict

__all__ = ["MemoryPrediction", "predict"]
