"""Documents in the datasets of two libraries: tensorflow-datasets and Hugging Face's datasets.

A prepared TFDS dataset in array_record files is read without TensorFlow; only TFDS's own
downloads need it. Nothing here waits for a network that is not there.
"""

import contextlib
import importlib.util
import logging
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from aogpt_jax.data import online
from aogpt_jax.data.files import Source, check_text, in_one_line
from aogpt_jax.errors import UserError, nearest

log = logging.getLogger(__name__)

_TFDS_URL = 'https://storage.googleapis.com/tfds-data'
_RECORDS = 64  # read in one call


def open_tfds(spec: str, location: str, *, split: str, field: str, data_dir: str, download: bool,
              ) -> Source | None:
  """Opens a TFDS dataset.

  Args:
    spec: names the corpus in errors.
    location: NAME[/CONFIG][:VERSION], or the directory of a prepared dataset, which holds its
      dataset_info.json.
    split: as in TFDS, such as 'train[:10%]'; '' if there is only one.
    field: the feature with the text.
    data_dir: where named datasets are prepared; '': TFDS's default.
    download: prepare the dataset if it is not there, which needs TensorFlow.

  Returns:
    None for a dataset that would have to be downloaded, if `download` is not set.

  Raises:
    UserError: for whatever is wrong with the arguments, the dataset or the network.
  """
  import tensorflow_datasets as tfds
  with _one_line(spec), _quiet():
    if _is_path(location):
      builder = tfds.builder_from_directory(_tfds_directory(spec, location))
    else:
      builder = _tfds_builder(spec, location, os.path.expanduser(data_dir) or None)
      if not builder.is_prepared():
        _check_tfds_download(spec)
        if not download:
          return None
        builder.download_and_prepare(file_format='array_record')
    info = builder.info
    if info.file_format.value != 'array_record':
      raise UserError(f'corpus "{spec}": its files are {info.file_format.value}; only array_record '
                      'can be read: prepare it with file_format="array_record"')
    split = _choose_split(spec, split, info.splits)
    files = [pathlib.Path(path) for path in info.splits[split].filepaths]
    _check_field(spec, field, info.features)
    records = builder.as_data_source(split=split)

  def batches() -> Iterator[list]:
    for start in range(0, len(records), _RECORDS):
      indices = range(start, min(start + _RECORDS, len(records)))
      values = [record[field] for record in records.__getitems__(list(indices))]
      if None in values:  # what array_record gives of a truncated file
        raise UserError(f'corpus "{spec}": record {start + values.index(None) + 1} is missing; the '
                        f'files in {builder.data_path} are damaged')
      yield values

  return Source(files, ('tfds', split, field), lambda: _read(spec, batches(), field))


def _tfds_directory(spec: str, location: str) -> str:
  directory = os.path.expanduser(location)
  if os.path.isfile(os.path.join(directory, 'dataset_info.json')):
    return directory
  inside = sorted(path.parent for path in pathlib.Path(directory).glob('**/dataset_info.json'))
  hint = f'; did you mean "tfds:{inside[-1]}"?' if inside else ''
  raise UserError(f'corpus "{spec}": no prepared TFDS dataset (dataset_info.json) in '
                  f'"{directory}"{hint}')


def _tfds_builder(spec: str, name: str, data_dir: str | None) -> Any:
  import tensorflow_datasets as tfds
  try:
    return tfds.builder(name, data_dir=data_dir, file_format='array_record')
  except tfds.core.DatasetNotFoundError:
    bare = name.split('/')[0].split(':')[0]
    close = nearest(bare, tfds.list_builders(with_community_datasets=False))
    hint = close if 'did you mean' in close else ''
    raise UserError(f'corpus "{spec}": TFDS knows no dataset "{bare}"'
                    f'{f" and {data_dir} holds none" if data_dir else ""}{hint}') from None


def _check_tfds_download(spec: str) -> None:
  instead = ('prepare it elsewhere and name its directory (tfds:DIRECTORY), or read files '
             '(files:GLOB)')
  if importlib.util.find_spec('tensorflow') is None:
    raise UserError(f'corpus "{spec}": is not prepared here, and the downloads of TFDS need '
                    f"TensorFlow (pip install 'aogpt_jax[tfds]'); or {instead}")
  if not online.reachable(_TFDS_URL):
    raise UserError(f'corpus "{spec}": is not prepared here, and there is no network; {instead}')


def open_hf(spec: str, location: str, *, split: str, field: str, revision: str, download: bool,
            ) -> Source | None:
  """Opens a Hugging Face dataset.

  Args:
    spec: names the corpus in errors.
    location: NAME, OWNER/NAME or OWNER/NAME/CONFIG on the hub, or a directory: one that
      `save_to_disk` made, or one that holds data files.
    split: as in `datasets`; '' if there is only one.
    field: the column with the text.
    revision: of a hub repository; '': its main branch.
    download: get what is not in the cache.

  Returns:
    None for a dataset on the hub, if the network is there and `download` is not set.

  Raises:
    UserError: for whatever is wrong with the arguments, the dataset or the network.
  """
  online.require('datasets', 'hf', f'corpus "{spec}"')
  local = _is_path(location)
  if not local and not re.fullmatch(r'[\w.-]+(/[\w.-]+){0,2}', location):
    raise UserError(f'corpus "{spec}": "{location}" must be NAME, OWNER/NAME, OWNER/NAME/CONFIG or '
                    'a directory')
  with _one_line(spec):
    if local:
      dataset = _hf_directory(spec, os.path.expanduser(location), split)
    elif _hub_reachable():
      if not download:
        return None
      dataset = _hub_dataset(location, split, revision)
    else:
      dataset = _cached_dataset(spec, location, split, revision)
    if isinstance(dataset, dict):
      split = _choose_split(spec, split, dataset)
      if split not in dataset:
        raise UserError(f'corpus "{spec}": no split "{split}"; valid: {", ".join(dataset)}')
      dataset = dataset[split]
    _check_field(spec, field, dataset.features)
    dataset = dataset.select_columns([field])
  identity = ('hf', split, field)
  files = [pathlib.Path(file['filename']) for file in dataset.cache_files] if local else []
  if not files:
    identity += (location, dataset._fingerprint)
  return Source(files, identity, lambda: _read(
      spec, (batch[field] for batch in dataset.iter(_RECORDS)), field))


def _hf_directory(spec: str, directory: str, split: str) -> Any:
  import datasets
  if not os.path.isdir(directory):
    raise UserError(f'corpus "{spec}": there is no directory "{directory}"')
  if not {'state.json', 'dataset_dict.json'}.intersection(os.listdir(directory)):
    return datasets.load_dataset(directory, split=split or None)
  dataset = datasets.load_from_disk(directory)
  if split and not isinstance(dataset, dict):
    raise UserError(f'corpus "{spec}": the dataset in "{directory}" has no splits; '
                    'leave out split=')
  return dataset


def _hub_dataset(location: str, split: str, revision: str) -> Any:
  import datasets
  owner, slash, rest = location.partition('/')
  name, _, config = rest.partition('/')
  return datasets.load_dataset(owner + slash + name, config or None, split=split or None,
                               revision=revision or None)


def _hub_reachable() -> bool:
  import datasets
  return not datasets.config.HF_HUB_OFFLINE and online.reachable(datasets.config.HF_ENDPOINT)


def _cached_dataset(spec: str, location: str, split: str, revision: str) -> Any:
  """The dataset in the library's cache, where it does not note which revision it is."""
  with _offline():
    try:
      dataset = _hub_dataset(location, split, revision)
    except ConnectionError:
      raise UserError(
          f'corpus "{spec}": is not in the cache of `datasets`, and there is no network; get it '
          'elsewhere and name its directory (hf:DIRECTORY) or its files (files:GLOB; of a recipe: '
          'NAME#path=GLOB)') from None
  log.warning('corpus "%s": no network; reading the copy in the cache of `datasets`, of whatever '
              'revision that is', spec)
  return dataset


@contextlib.contextmanager
def _offline() -> Iterator[None]:
  """Keeps both libraries from trying the network, which takes them half a minute."""
  import datasets
  import huggingface_hub
  places = (datasets.config, huggingface_hub.constants)
  before = [place.HF_HUB_OFFLINE for place in places]
  try:
    for place in places:
      place.HF_HUB_OFFLINE = True
    yield
  finally:
    for place, value in zip(places, before):
      place.HF_HUB_OFFLINE = value


def _is_path(location: str) -> bool:
  return location.startswith(('/', '.', '~')) or os.path.isdir(location)


def _choose_split(spec: str, split: str, valid: Iterable[str]) -> str:
  valid = list(valid)
  if split:
    return split
  if len(valid) != 1:
    raise UserError(f'corpus "{spec}": name a split, such as #split={valid[0]}; '
                    f'valid: {", ".join(valid)}')
  return valid[0]


def _check_field(spec: str, field: str, valid: Iterable[str]) -> None:
  if field not in valid:
    raise UserError(f'corpus "{spec}": has no field "{field}"; valid: {", ".join(valid)}; '
                    'name it with #field=NAME')


def _read(spec: str, batches: Iterable[list], field: str) -> Iterator[str]:
  number = 0
  with _one_line(spec):
    for batch in batches:
      for value in batch:
        number += 1
        yield check_text(value, f'corpus "{spec}", record {number}', field)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Hides the warnings that TFDS logs about datasets that are not there."""
  from absl import logging as absl_logging
  verbosity = absl_logging.get_verbosity()
  absl_logging.set_verbosity(absl_logging.ERROR)
  try:
    yield
  finally:
    absl_logging.set_verbosity(verbosity)


@contextlib.contextmanager
def _one_line(spec: str) -> Iterator[None]:
  """Turns what the two libraries raise, which is of many types, into a UserError."""
  try:
    yield
  except UserError:
    raise
  except Exception as error:
    hint = '; name a converted revision, such as #revision=refs/convert/parquet, or local files' * (
        'scripts are no longer supported' in str(error))
    raise UserError(f'corpus "{spec}": cannot be read ({type(error).__name__}: '
                    f'{in_one_line(error)}){hint}') from error
