"""A model's files and what they make of text and chats: token ids, as transformers has them.

`folder` finds a model's folder, `tokenizer` loads its tokenizer and renders chats, `template` prepares a chat's body
for the template, `pieces` encodes once what many chats share. Both a router and a replay of an API's log tokenize with
them.
"""
