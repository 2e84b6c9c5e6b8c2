"""A trained model after its run: finds its files, loads it with adapters and heads, chats with it, exports it.

find.py          RUN, folder or hub id -> where weights, adapters, heads and tokenizer are
load.py          the model and the tokenizer in memory
chat.py          a conversation in the terminal
export.py        weights in another dtype, merged adapters, GGUF, the hub
part_folder.py   a temporary folder that does not stay after a signal
"""
