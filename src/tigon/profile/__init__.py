"""What a step of training does to memory, and where its time goes.

device.py          what a device has and holds
peak.py            the peak of a stretch of code
timeline.py        what was alive when: the format that everything below shares
  cpu.py, cuda.py  record it, each its device's way; frames.py, quiet.py help
  journal.py       what is known besides: phases, and which tensors are what; watch.py hears it from the model
  assemble.py      both together
peak_report.py     what the peak is made of, and who made it
op_table.py        operators by time
result.py          one profiled run as a file
tables.py, page.py, timeline_chart.py   for the terminal, as HTML, as a drawing
figure.py          the look of every chart
units.py           numbers as readers see them
"""
