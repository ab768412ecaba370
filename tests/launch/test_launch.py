"""The launchers, with fake gcloud, srun and scontrol on PATH that record how they were called."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / 'launch'
TPU = ('--name=a', '--zone=z')
KIND = ('--type=v5litepod-16', '--version=v2-alpha-tpuv5-lite')
RUN = ('--', '--config=configs/small.py', '--workdir=/mnt/aogpt/a run')

FAKE = '''#!{python}
import json, os, pathlib, sys
here = pathlib.Path(os.environ['FAKE'])
with open(here / 'calls', 'a') as file:
  file.write(json.dumps([{name!r}, *sys.argv[1:]]) + '\\n')
states = here / 'states'
if 'describe' in sys.argv:
  first, *rest = states.read_text().split()
  if first == 'gone':
    sys.exit('NOT_FOUND')
  print(first)
  states.write_text(' '.join(rest or [first]))
if {name!r} == 'srun':
  sys.exit(os.system(os.environ.get('FAKE_SRUN', 'true')) >> 8)
'''


@pytest.fixture
def fake(tmp_path):
  """(script, arguments, states that gcloud tells in turn) -> (process, calls)."""
  (tmp_path / 'bin').mkdir()
  for name in ('gcloud', 'srun', 'scontrol', 'nvidia-smi'):
    path = tmp_path / 'bin' / name
    path.write_text(FAKE.format(python=sys.executable, name=name))
    path.chmod(0o755)

  def run(script, *args, states='ACTIVE', cwd=ROOT, **environment):
    (tmp_path / 'calls').write_text('')
    (tmp_path / 'states').write_text(states)
    env = os.environ | {'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}', 'FAKE': str(tmp_path),
                        'TMPDIR': str(tmp_path)} | environment
    result = subprocess.run(['bash', str(LAUNCH / script), *args], env=env, cwd=cwd,
                            capture_output=True, text=True, timeout=60)
    calls = [json.loads(line) for line in (tmp_path / 'calls').read_text().splitlines()]
    return result, calls
  return run


def test_shellcheck_is_content():
  checker = shutil.which('shellcheck') or str(pathlib.Path(sys.executable).parent / 'shellcheck')
  found = subprocess.run([checker, *map(str, sorted(LAUNCH.iterdir()))], capture_output=True,
                         text=True)
  assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize('script', ['tpu_vm.sh', 'gpu_node.sh', 'gpu_slurm.sbatch'])
def test_help_needs_nothing(script, fake):
  result, calls = fake(script, '--help')
  assert result.returncode == 0 and '--dry-run' in result.stdout and calls == []


SSH = ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh']
QUEUED = ['gcloud', 'compute', 'tpus', 'queued-resources']


def test_a_tpu_run_from_nothing_through_a_preemption_to_its_deletion(fake, tmp_path):
  """create, setup, train, preempted, resume, delete: every call of gcloud, in order."""
  create = [*QUEUED, 'create', 'a', '--zone=z', '--node-id=a', '--accelerator-type=v5litepod-16',
            '--runtime-version=v2-alpha-tpuv5-lite', '--spot']
  describe = [*QUEUED, 'describe', 'a', '--zone=z', '--format=value(state.state)']
  result, calls = fake('tpu_vm.sh', 'create', *TPU, *KIND, '--spot', '--poll=0',
                       states='WAITING_FOR_RESOURCES PROVISIONING ACTIVE')
  assert result.returncode == 0, result.stderr
  assert calls == [create, *[describe] * 3]
  assert result.stdout.split() == ['a:', 'WAITING_FOR_RESOURCES', 'a:', 'PROVISIONING', 'a:',
                                   'ACTIVE']

  result, setup = fake('tpu_vm.sh', 'setup', *TPU, '--nfs=10.0.0.2:/share')
  assert result.returncode == 0, result.stderr
  archive = str(tmp_path / 'aogpt_jax-a.tar.gz')
  listed = subprocess.run(['tar', '-tzf', archive], capture_output=True, text=True).stdout
  assert {'setup.py', 'aogpt_jax/main.py', 'configs/small.py'} <= set(listed.split())
  assert setup[0] == ['gcloud', 'compute', 'tpus', 'tpu-vm', 'scp', archive, 'a:aogpt_jax.tar.gz',
                      '--zone=z', '--worker=all']
  assert [call[:8] for call in setup[1:]] == [[*SSH, 'a', '--zone=z', '--worker=all']] * 2
  assert 'pip install' in setup[1][8] and '.[tpu' in setup[1][8]
  assert 'mount -t nfs 10.0.0.2:/share /mnt/aogpt' in setup[2][8]

  result, train = fake('tpu_vm.sh', 'train', *TPU, *RUN)
  assert result.returncode == 0, result.stderr
  ((*prefix, command),) = train
  assert prefix == [*SSH, 'a', '--zone=z', '--worker=all']
  assert ('-m aogpt_jax.main --distributed --config=configs/small.py '
          '--workdir=/mnt/aogpt/a\\ run >> ') in command

  result, calls = fake('tpu_vm.sh', 'status', *TPU, states='SUSPENDED')
  assert calls == [describe] and result.stdout == 'a: SUSPENDED\n'

  delete = [*QUEUED, 'delete', 'a', '--zone=z', '--force', '--quiet']
  result, calls = fake('tpu_vm.sh', 'resume', *TPU, *KIND, '--spot', '--nfs=10.0.0.2:/share', *RUN,
                       states='SUSPENDED ACTIVE')
  assert result.returncode == 0, result.stderr
  assert calls == [describe, delete, create, describe, *setup, *train]

  result, calls = fake('tpu_vm.sh', 'delete', *TPU)
  assert result.returncode == 0 and calls == [delete]


def test_resume_where_the_tpu_is_there_or_gone(fake):
  result, calls = fake('tpu_vm.sh', 'resume', *TPU, *KIND, *RUN)
  assert result.returncode == 0, result.stderr
  assert [call[3:5] for call in calls] == [['queued-resources', 'describe'], ['tpu-vm', 'ssh']]
  result, calls = fake('tpu_vm.sh', 'resume', *TPU, *KIND, *RUN, states='gone ACTIVE')
  assert [call[4] for call in calls[:2]] == ['describe', 'create']


def test_several_slices(fake):
  """One queued resource of several nodes; every host of every node gets the command."""
  result, calls = fake('tpu_vm.sh', 'create', *TPU, *KIND, '--slices=2', '--project=p')
  assert calls[0][4:9] == ['create', 'a', '--zone=z', '--project=p', '--node-prefix=a']
  assert calls[0][9] == '--node-count=2'
  result, calls = fake('tpu_vm.sh', 'train', *TPU, '--slices=2', *RUN)
  assert result.returncode == 0, result.stderr
  assert [call[5] for call in calls] == ['a-0', 'a-1']
  assert calls[0][-1] == calls[1][-1]


def test_a_tpu_that_is_not_granted_ends_the_wait(fake):
  result, _ = fake('tpu_vm.sh', 'create', *TPU, *KIND, '--poll=0', states='ACCEPTED FAILED')
  assert result.returncode == 2 and 'error: a is FAILED' in result.stderr


@pytest.mark.parametrize(('script', 'args', 'message'), [
    ('tpu_vm.sh', [], 'no command; one of create'),
    ('tpu_vm.sh', ['start'], 'unknown command "start"'),
    ('tpu_vm.sh', ['create', '--zone=z', *KIND], '--name is missing; create needs it'),
    ('tpu_vm.sh', ['create', '--name=a', *KIND], '--zone is missing'),
    ('tpu_vm.sh', ['create', *TPU, KIND[1]], '--type is missing; create needs it, such as --type='),
    ('tpu_vm.sh', ['create', *TPU, KIND[0]], '--version is missing'),
    ('tpu_vm.sh', ['create', *TPU, *KIND, '--slices=0'], '--slices=0: must be a number'),
    ('tpu_vm.sh', ['resume', *TPU, *KIND], '--config=FILE is missing after --'),
    ('tpu_vm.sh', ['train', *TPU, '--', '--config=c'], '--workdir=DIR is missing after --'),
    ('tpu_vm.sh', ['setup', *TPU, '--nfs=host'], '--nfs=host: must be HOST:/DIRECTORY'),
    ('tpu_vm.sh', ['train', *TPU, '--config=c'], 'flags of the program come after --'),
    ('gpu_node.sh', ['train', '--', '--config=c'], '--workdir=DIR is missing after --'),
    ('gpu_node.sh', ['train', '--gpus=a', '--', '--config=c', '--workdir=w'], '--gpus=a: must be'),
    ('gpu_node.sh', ['stop'], '--workdir=DIR is missing; stop needs it'),
    ('gpu_slurm.sbatch', ['--config=c'], '--workdir=DIR is missing'),
    ('gpu_slurm.sbatch', ['--workdir=w'], '--config=FILE is missing'),
    ('gpu_slurm.sbatch', ['--config=c', '--workdir=w'], 'not in a Slurm job')])
def test_what_is_missing_is_said_before_anything_is_called(script, args, message, fake):
  result, calls = fake(script, *args)
  assert result.returncode == 2 and calls == []
  assert result.stderr.startswith('error: ') and message in result.stderr


@pytest.mark.parametrize(('script', 'args', 'parts'), [
    ('tpu_vm.sh', ['create', *TPU, *KIND], ['queued-resources create a', '--node-id=a']),
    ('tpu_vm.sh', ['resume', *TPU, *KIND, *RUN], ['delete a', 'create a', 'scp', 'ssh a']),
    ('tpu_vm.sh', ['status', *TPU], ['describe a', 'ssh a']),
    ('tpu_vm.sh', ['logs', *TPU], ['--worker=0']),
    ('gpu_node.sh', ['train', '--gpus=0,1', '--', '--config=c', '--workdir=w'],
     ['nohup env CUDA_VISIBLE_DEVICES=0', 'aogpt_jax.main --config=c --workdir=w']),
    ('gpu_node.sh', ['setup'], ['-m venv', 'cuda']),
    ('gpu_slurm.sbatch', ['--config=c', '--workdir=w'],
     ['srun --kill-on-bad-exit=1', '--distributed --config=c --workdir=w'])])
def test_a_dry_run_prints_the_commands_and_calls_nothing(script, args, parts, fake):
  first, *rest = args
  result, calls = fake(script, first, '--dry-run', *rest)
  assert result.returncode == 0 and calls == [], result.stderr
  assert all(part in result.stdout for part in parts), result.stdout


@pytest.fixture
def project(tmp_path):
  """A directory whose .venv/bin/python is this one."""
  (tmp_path / 'project' / '.venv' / 'bin').mkdir(parents=True)
  (tmp_path / 'project' / '.venv' / 'bin' / 'python').symlink_to(sys.executable)
  return tmp_path / 'project'


def test_a_slurm_job_is_queued_again_until_the_run_is_done(fake, project, tmp_path):
  """srun gets every flag; a run without its evaluation was stopped, and goes on later."""
  slurm = {'SLURM_JOB_ID': '7', 'SLURM_SUBMIT_DIR': str(project), 'SLURM_NTASKS_PER_NODE': '4',
           'SLURM_GPUS_ON_NODE': '4'}
  args = ('--config=c', f'--workdir={tmp_path}/a run', '--config.seed=1')
  result, calls = fake('gpu_slurm.sbatch', *args, **slurm)
  assert result.returncode == 0, result.stderr
  python = str(project / '.venv' / 'bin' / 'python')
  srun = ['srun', '--kill-on-bad-exit=1', python, '-m', 'aogpt_jax.main', '--distributed', *args]
  assert calls == [srun, ['scontrol', 'requeue', '7']]
  (tmp_path / 'a run').mkdir()
  (tmp_path / 'a run' / 'evaluation.json').touch()
  result, calls = fake('gpu_slurm.sbatch', *args, **slurm)
  assert result.returncode == 0 and calls == [srun]
  (tmp_path / 'a run' / 'evaluation.json').unlink()
  result, calls = fake('gpu_slurm.sbatch', *args, **slurm, FAKE_SRUN='exit 2')
  assert result.returncode == 2 and calls == [srun]  # an error is not tried again
  result, calls = fake('gpu_slurm.sbatch', *args, **slurm | {'SLURM_GPUS_ON_NODE': '8'})
  assert calls == [] and '--ntasks-per-node=4 must equal the 8 GPUs' in result.stderr


def test_a_gpu_node_starts_stops_and_refuses_a_second_start(tmp_path, fake):
  """With a copy of the script in a project whose Python only waits."""
  project = tmp_path / 'copy'
  (project / 'launch').mkdir(parents=True)
  shutil.copy(LAUNCH / 'gpu_node.sh', project / 'launch')
  python = project / '.venv' / 'bin' / 'python'
  python.parent.mkdir(parents=True)
  python.write_text('#!/usr/bin/env bash\necho "$CUDA_VISIBLE_DEVICES: $@"\nexec sleep 60\n')
  python.chmod(0o755)
  script, workdir = project / 'launch' / 'gpu_node.sh', tmp_path / 'run'
  run = ('--', '--config=c', f'--workdir={workdir}')
  result, _ = fake(script, 'train', '--gpus=1', *run)
  assert result.returncode == 0, result.stderr
  try:
    result, _ = fake(script, 'train', *run)
    assert result.returncode == 2 and 'already running as process' in result.stderr
    deadline = time.monotonic() + 30
    while 'main' not in (workdir / 'launch.log').read_text() and time.monotonic() < deadline:
      time.sleep(0.05)
    result, calls = fake(script, 'status', f'--workdir={workdir}')
    assert 'running as process' in result.stdout and calls[0][0] == 'nvidia-smi'
    assert f'1: -m aogpt_jax.main --config=c --workdir={workdir}' in result.stdout
  finally:
    result, _ = fake(script, 'stop', f'--workdir={workdir}')
  assert result.returncode == 0, result.stderr
  deadline = time.monotonic() + 30
  while 'not running' not in fake(script, 'status', f'--workdir={workdir}')[0].stdout:
    assert time.monotonic() < deadline
    time.sleep(0.1)
