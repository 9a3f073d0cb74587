"""The coordinator: an HTTP shell around aggregation. No torch; docs/wire.md names every endpoint.

    app.py        the routes, and who answers
    watching.py   for everybody: the dashboard, the status, the metrics
    working.py    for workers: join, ask, blobs, updates
    serving.py    for members who serve: certificates, stages, which checkpoint (served.py)
    owning.py     for the owner: pause, ban, tokens, checkpoints
    door.py       who may come in, and how often
    answers.py    reading and answering, within limits

Workers come from outside, owners with their token, and anybody may watch. What is read from the
network is bounded before it is read; what takes long happens in threads.
"""

from blocktrain.services.coordinator.app import Coordinator

__all__ = ["Coordinator"]
