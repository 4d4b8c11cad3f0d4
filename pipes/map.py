"""Every map pipe, by its class name; their chained names are methods of all of them."""

from pipes.datapipe import DataChunk, MapDataPipe, functional_datapipe
from pipes.stages.mapping import MapMapper as Mapper
from pipes.stages.wrapping import SequenceWrapper

__all__ = ["DataChunk", "MapDataPipe", "Mapper", "SequenceWrapper", "functional_datapipe"]
