"""Refuses the destruction of runs that are exported nowhere (constructs/export.py)."""

from __future__ import annotations

from . import waiting
from .waiting import Answer, Event, Failed


def on_event(event: Event, context: object) -> Answer:
    return waiting.began(event, "data-loss-guard")


def is_complete(event: Event, context: object) -> Answer:
    """Raises Failed on delete, unless data loss was allowed by a deployment, or the stack itself stays."""
    allowed = event["ResourceProperties"]["AllowDataLoss"] == "true"
    if event["RequestType"] != "Delete" or allowed or not waiting.destroying(event):
        return waiting.done()
    raise Failed(
        "refused: destroying deletes all runs and checkpoints, and no bucket has them. Nothing was ended. Set "
        "storage.export_bucket, or storage.allow_data_loss = true, in the profile; deploy; then destroy again"
    )
