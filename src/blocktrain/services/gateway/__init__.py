"""The gateway: OpenAI-compatible HTTP over a pipeline, and the playground page beside it.

    app.py        the routes, and who answers
    telling.py    one text, from being asked for to its last byte
    legs.py       where its time went
    openai.py     requests and answers as OpenAI writes them
    forms.py      a text as such answers
    watching.py   the same for the playground: traversal by traversal, hop by hop
    texts.py      bytes -> text: whole characters, and no stop in it
    fair.py       who is served when
    door.py       who may ask
    keys.py       API keys, kept as hashes
    answers.py    reading and answering, within limits

What is read from the network is bounded before it is read. Prompts and texts are never logged.
"""

from blocktrain.services.gateway.app import Gateway

__all__ = ["Gateway"]
