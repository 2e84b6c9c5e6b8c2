"""CUDA graphs of the decoder layers: the technique, and the capture of a layer (layer_graphs.py)."""
