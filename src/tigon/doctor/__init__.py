"""`tigon doctor`: installed versions, a self-test of the ops on this machine, and the patch report of a model.

environment   versions, device, and conditions that rows of known_bad name
known_bad     combinations known to fail, one row each, with the source of the claim
self_test     compares every op with its fp64 formula in a child process, so that a crash becomes a finding
model         the patch report of a model that is built without weights
diagnosis     the findings of the other four, as text and JSON
"""

from __future__ import annotations

from tigon.doctor.diagnosis import Diagnosis, diagnose
from tigon.doctor.finding import Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]
