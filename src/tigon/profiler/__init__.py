"""What a training step does to memory, and where its time goes.

recording/   every allocation with the operator and the line that made it, on the CPU and on CUDA
timeline/    from a recording to what was alive when
render/      tables, charts and profile.html
"""
