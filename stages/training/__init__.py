"""The engine: one train step, the techniques around it, what a checkpoint holds, the loop."""
