"""Post-training by TRL's trainers.

trl_trainer.py   TRL's trainer with the guards of every run
rewards.py       reward functions that a recipe names
"""
