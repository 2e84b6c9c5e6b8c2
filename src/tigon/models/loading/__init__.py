"""Loads models by name: presets, folders, hub ids.

config.py         name -> transformers config, and the model on the meta device
presets.py        shapes of well-known models, with random weights
auto.py           `tigon.AutoModelForCausalLM`
auto_class.py     the class of transformers that loads a config's model
weight_files.py   the headers of a checkpoint's safetensors, compared with the model
hub.py            sets offline mode after a single request, which is sent only for a hub id
"""
