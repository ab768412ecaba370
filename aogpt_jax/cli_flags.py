"""The flags of the command line, and which job takes which."""

from absl import flags
from ml_collections import config_flags

MODES = ('train', 'prepare', 'evaluate', 'sample', 'infill', 'score', 'convert', 'bench', 'drill')
SUITES = ('samplers', 'train', 'generate', 'growth', 'top_p', 'encoder', 'evaluate', 'data',
          'prepare', 'compile', 'attention')

config_flags.DEFINE_config_file(
    'config', None, 'Config file; override fields with --config.section.field=value after it.')
flags.DEFINE_string('workdir', None, 'Directory of the run: written by train, read by the other '
                    'modes.')
flags.DEFINE_enum('mode', 'train', MODES, 'What to do.')
flags.DEFINE_bool('overwrite', False, 'train: delete the run in --workdir first; '
                  'convert: replace the .pt file --destination.')
flags.DEFINE_bool('dry_run', False, 'train: print parameters, partition table, bytes a device and '
                  'FLOPs of the compiled step, and exit; needs neither data nor --workdir.')
flags.DEFINE_string('profile_steps', None, 'train: FIRST:LAST, the steps to trace into '
                    'WORKDIR/profile, for TensorBoard.')
flags.DEFINE_string('source', None, 'convert, evaluate, score: a .pt file, a run, or one '
                    'step of it; without it, evaluate and score use --workdir.')
flags.DEFINE_string('destination', None, 'convert: a new run, or a .pt file.')
flags.DEFINE_integer('context_length', None, 'convert, from .pt: keep the '
                     'positions below it alone.')
flags.DEFINE_string('tokenizer', None, 'convert, evaluate, score: the tokenizer of a '
                    '.pt file, such as gpt2; see data.tokenizer.')
flags.DEFINE_string('output', None, 'sample, infill, score: file of JSON lines; - for '
                    'stdout. evaluate, bench: directory of the results.')
flags.DEFINE_string('html', None, 'sample, infill: a page that plays the generation.')
flags.DEFINE_string('text', None, 'infill: a text with holes, <mask:k> for k tokens; '
                    'score: a text.')
flags.DEFINE_string('input', None, 'infill, score: a file of such lines; - for stdin.')
flags.DEFINE_multi_string('corpus', None, 'evaluate: a corpus, such as embedded:milton; '
                          'may be repeated; default: data.validation.')
flags.DEFINE_multi_string('order', None, 'evaluate: an order, may be repeated; default: '
                          'all that the model knows. score: one, default left_to_right.')
flags.DEFINE_string('judge', None, 'evaluate: judge the texts of the model instead, by a '
                    'run of this project, or a Hugging Face causal LM, hf:NAME.')
flags.DEFINE_string('sampler', None, 'sample, infill: parallel, sequential, speculative '
                    'or adaptive; short for --config.sample.sampler.')
flags.DEFINE_enum('suite', 'samplers', SUITES, 'bench: what to measure.')
flags.DEFINE_enum('peer', 'gpt2', ('gpt2', 'none'), 'bench: the other side of the suites train, '
                  'generate and evaluate, GPT-2 of Hugging Face; none: leave it out.')
flags.DEFINE_bool('distributed', False, 'train, evaluate: one run of several processes, on a '
                  'cluster that JAX finds by itself: TPU pod, GKE, Slurm, Open MPI.')
flags.DEFINE_string('coordinator', None, 'Or, elsewhere: HOST:PORT of process 0, with')
flags.DEFINE_integer('num_processes', None, 'the number of processes, and')
flags.DEFINE_integer('process_id', None, 'the number of this one, from 0.')
flags.DEFINE_bool('allow_older_checkpoint', False, 'train: if the newest checkpoint is damaged, '
                  'set it aside and continue from the one before.')
DISTRIBUTED = ('distributed', 'coordinator', 'num_processes', 'process_id')
# The flags that belong to some modes alone.
MODE_FLAGS = {
    'train': ('config', 'workdir', 'overwrite', 'dry_run', 'profile_steps',
              'allow_older_checkpoint', *DISTRIBUTED),
    'evaluate': ('config', 'workdir', 'source', 'tokenizer', 'corpus', 'order', 'judge',
                 'output', *DISTRIBUTED),
    'score': ('config', 'workdir', 'source', 'tokenizer', 'text', 'input', 'order', 'output'),
    'prepare': ('config', 'workdir'),
    'sample': ('config', 'workdir', 'output', 'html', 'sampler'),
    'infill': ('config', 'workdir', 'output', 'html', 'sampler', 'text', 'input'),
    'drill': ('workdir',),
    'bench': ('config', 'workdir', 'suite', 'peer', 'output'),
    'convert': ('source', 'destination', 'context_length', 'tokenizer', 'overwrite')}
