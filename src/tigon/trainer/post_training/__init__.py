"""Post-training by TRL's trainers.

trl_trainer.py              TRL's trainer with the guards of every run
rewards.py                  reward functions that a recipe names
tools_and_environments.py   functions that the model may call, and environments
named_objects.py            loads what a recipe names as module:function
completions.py              completions with their rewards, for terminal, report and trackers
reward_stop.py              ends training when the reward has collapsed
"""
