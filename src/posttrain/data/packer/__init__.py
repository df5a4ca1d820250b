"""From train groups to tensors. Labels are shifted here and nowhere else."""

from posttrain.data.packer.batch import PolicyBatch
from posttrain.data.packer.plan import micro_batches
from posttrain.data.packer.text import TrainSample, pack, samples_of

__all__ = ["PolicyBatch", "TrainSample", "micro_batches", "pack", "samples_of"]
