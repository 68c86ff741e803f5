"""Prediction of the peak memory of a training step, from shapes alone."""

from stages.memory.analytic import MemoryPrediction, predict

__all__ = ["MemoryPrediction", "predict"]
