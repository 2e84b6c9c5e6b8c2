"""`tigon doctor`: what is installed, whether the ops are right on this machine, and what a model gets and why not.

environment   versions, device, and the conditions that are known to matter
known_bad     combinations known to fail, one row each, with the source of the claim
self_test     every op against its fp64 formula, in a process of its own, so that a crash is a finding
model         a model built without weights and patched: its patch report
diagnosis     the four together: findings, text, JSON
"""

from __future__ import annotations

from tigon.doctor.diagnosis import Diagnosis, diagnose
from tigon.doctor.finding import Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]
