"""A trained model after its run: finds its files, loads it with adapters and heads, chats with it, exports it.

find.py          RUN, folder or hub id -> where weights, adapters, heads and tokenizer are
load.py          the model and the tokenizer in memory
chat.py          a conversation in the terminal
answers.py       the tokens of an answer: tigon's generator, transformers or heads
export.py        weights in another dtype, merged adapters, the hub
verify.py        the exported model beside the trained one: weights, layers, tokens, stop tokens
probes.py        the texts on which they are compared
readers.py       exported files as transformers and PEFT load them
gguf_export.py   a GGUF file, by the package gguf or llama.cpp's converter
gguf_file.py     its config and tensors
gguf_tokenizer.py  its tokenizer
ollama.py        the Modelfile
part_folder.py   a temporary folder that does not stay after a signal
"""
