"""Every map pipe, by its class name; their chained names are methods of all of them."""

from pipes.datapipe import DataChunk, MapDataPipe, functional_datapipe
from pipes.stages.gathering import IterToMapConverter
from pipes.stages.keyed import MapBatcher as Batcher
from pipes.stages.keyed import MapConcater as Concater
from pipes.stages.keyed import MapInMemoryCacheHolder as InMemoryCacheHolder
from pipes.stages.keyed import MapMapper as Mapper
from pipes.stages.keyed import MapShuffler as Shuffler
from pipes.stages.keyed import MapZipper as Zipper
from pipes.stages.unzipping import MapUnZipper as UnZipper
from pipes.stages.wrapping import SequenceWrapper

__all__ = [
    "Batcher",
    "Concater",
    "DataChunk",
    "InMemoryCacheHolder",
    "IterToMapConverter",
    "MapDataPipe",
    "Mapper",
    "SequenceWrapper",
    "Shuffler",
    "UnZipper",
    "Zipper",
    "functional_datapipe",
]
