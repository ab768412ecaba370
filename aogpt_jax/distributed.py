"""Several processes as one run: how they start, and how they agree.

Every process runs the same program. What only one may do (delete, write, train a tokenizer) is done
by process 0 while the others wait; a mistake that one process finds ends all of them, since a
process that went on alone would wait for the others for ever.

Waiting goes through the coordination service, not through the devices: it may take hours (packing
a corpus), and collectives on devices time out.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import pathlib
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from aogpt_jax.errors import UserError

T = TypeVar('T')

# A process that dies is noticed by JAX's heartbeats, so waiting needs no short limit of its own.
WAIT_SECONDS = 7 * 24 * 3600
GOODBYE_SECONDS = 10
_calls = itertools.count()  # the same in every process, since all make the same calls


def start(automatic: bool, coordinator: str | None, num_processes: int | None,
          process_id: int | None, timeout: int = 300) -> None:
  """Joins the processes of a run; call it before anything uses a device. No flag: one process.

  Args:
    automatic: JAX finds the cluster (TPU pod, GKE, Slurm, Open MPI, Kubernetes).
    coordinator, num_processes, process_id: or HOST:PORT of process 0, N and this process' number.
    timeout: seconds to wait for the others.

  Raises:
    UserError: for flags that do not go together, no cluster, or others that do not come.
  """
  explicit = {'--coordinator': coordinator, '--num_processes': num_processes,
              '--process_id': process_id}
  missing = [name for name, value in explicit.items() if value is None]
  if len(missing) == 3 and not automatic:
    return
  if automatic and len(missing) < 3:
    raise UserError('--distributed finds the cluster by itself; leave it out, or leave out '
                    f'{", ".join(name for name in explicit if name not in missing)}')
  if not automatic:
    _check_explicit(missing, coordinator, num_processes, process_id)
  import jax
  # JAX would take SIGTERM for itself, and swallow it until somebody asks; `loop.StopRequest` does.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    jax.distributed.initialize(coordinator, num_processes, process_id,
                               initialization_timeout=timeout)
  except (ValueError, RuntimeError) as error:  # jaxlib's errors are RuntimeErrors
    if automatic and 'be defined' in str(error):
      raise UserError(
          '--distributed: this is no cluster that JAX knows (TPU pod, GKE, Slurm, Open MPI, '
          'Kubernetes); start every process with --coordinator=HOST:PORT --num_processes=N '
          '--process_id=I instead') from None
    reason = str(error).strip().splitlines()[0]
    raise UserError(f'the processes of the run did not find each other '
                    f'(coordinator {coordinator or "of the cluster"}): {reason}') from error
  if jax.process_index():  # process 0 alone talks; what went wrong elsewhere is on stderr
    sys.stdout = open(os.devnull, 'w')
    logging.getLogger('aogpt_jax').setLevel(logging.WARNING)


def _check_explicit(missing: list[str], coordinator: str | None, num_processes: int | None,
                    process_id: int | None) -> None:
  if missing:
    raise UserError(f'{", ".join(missing)} is missing: --coordinator, --num_processes and '
                    '--process_id go together')
  host, _, port = coordinator.rpartition(':')
  if not host or not port.isdigit() or not 0 < int(port) < 65536:
    raise UserError(f'--coordinator={coordinator}: must be HOST:PORT of process 0, such as '
                    '10.0.0.1:8476')
  if num_processes < 1 or not 0 <= process_id < num_processes:
    raise UserError(f'--process_id={process_id}: must be in [0, --num_processes={num_processes})')


def _client() -> Any:
  from jax._src import distributed  # no public name; Orbax does the same
  return distributed.global_state.client


def is_first() -> bool:
  """Whether this is process 0, which writes and prints."""
  import jax
  return jax.process_index() == 0


def gather(text: str) -> list[str]:
  """The texts of all processes, in their order; waits for all of them."""
  import jax
  if jax.process_count() == 1:
    return [text]
  client, key = _client(), f'aogpt_jax/{next(_calls)}'
  client.key_value_set(f'{key}/{jax.process_index()}', text)
  return [client.blocking_key_value_get(f'{key}/{i}', WAIT_SECONDS * 1000)
          for i in range(jax.process_count())]


def together(function: Callable[[], T]) -> T:
  """Calls `function` in every process; if it fails in one, it fails in all.

  Raises:
    UserError: if another process failed. This process' own error is raised as it is.
  """
  result, failure = None, None
  try:
    result = function()
  except BaseException as error:  # also Ctrl-C: the others must not wait for this process
    failure = error
  says = '' if failure is None else ' '.join(str(failure).split()) or type(failure).__name__
  said = gather(says)
  if failure is not None:
    raise failure
  for index, text in enumerate(said):
    if text:
      raise UserError(f'process {index} failed: {text}')
  return result


def first_then_rest(function: Callable[[], T]) -> T:
  """Calls `function` in process 0, then, with what that left on disk, in the others."""
  nothing = lambda: None
  mine = together(function if is_first() else nothing)
  others = together(nothing if is_first() else function)
  return mine if is_first() else others


def on_first(function: Callable[[], T]) -> T:
  """Calls `function` in process 0 alone; every process gets its result, which must be JSON."""
  result = together(function if is_first() else lambda: None)
  return json.loads(gather(json.dumps(result) if is_first() else '')[0])


def check_same(what: str, value: str) -> None:
  """Raises UserError in every process unless `value` is the same in all of them."""
  digests = gather(hashlib.sha256(value.encode()).hexdigest())
  different = [i for i, digest in enumerate(digests) if digest != digests[0]]
  if different:
    raise UserError(f'{what}: not the same in process {", ".join(map(str, different))} as in '
                    'process 0')


def check_shared(directory: pathlib.Path, flag: str) -> None:
  """Raises UserError unless every process sees what process 0 writes to `directory`."""
  import jax
  if jax.process_count() == 1:
    return

  def write() -> str:
    path = directory / f'.hosts-{uuid.uuid4().hex}'
    path.touch()
    return path.name

  def look() -> None:
    if not (directory / name).exists():
      raise UserError(f'{flag}={directory}: process {jax.process_index()} does not see what '
                      'process 0 writes there; it must be on a file system that all hosts share')
  name = on_first(write)
  try:
    together(look)
  finally:
    if is_first():
      (directory / name).unlink()


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
  """Ends a process that failed alone at once; JAX would first wait 5 minutes for the others.

  When all of them fail, for the same reason as a rule, each leaves as it would by itself.
  """
  try:
    yield
  except BaseException as error:
    if _is_alone() or isinstance(error, SystemExit) and not error.code:
      raise
    if not isinstance(error, SystemExit):
      traceback.print_exc()
    try:
      _client().wait_at_barrier('aogpt_jax/failed', GOODBYE_SECONDS * 1000)
    except Exception:  # the others do not come: they are waiting for this process elsewhere
      sys.stderr.flush()
      os._exit(error.code if isinstance(error, SystemExit) and type(error.code) is int else 1)
    raise


def _is_alone() -> bool:
  if 'jax' not in sys.modules or _client() is None:
    return True
  import jax
  return jax.process_count() == 1
