"""Chat messages, from the columns of a row to text.

- `messages.py`: reads messages as people store them.
- `chat_template.py`: turns messages into text, and finds the assistant's turns in it.
- `render_chat.py`: calls a chat template, which may fail or never end.
- `row_notes.py`: says what a row has that its text does not teach.
"""
