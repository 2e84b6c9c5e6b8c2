"""What a step of training does to memory.

device.py  what a device has and holds
peak.py    the peak of a stretch of code
figure.py  the look of every chart
"""
