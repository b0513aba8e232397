"""What a GPU's own counters should show, predicted before anything is measured; without torch.

`parlab.distributed.gpu` measures the same, and `parlab.measurements` keeps both side by side.
"""
