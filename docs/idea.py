"""Draws docs/idea.png: one sequence, one order, the items it becomes. Needs matplotlib.

    python docs/idea.py
"""

import pathlib

import matplotlib
import matplotlib.pyplot as plt

matplotlib.use('Agg')

WORDS = ['to', 'be', 'or', 'not']
ORDER = [2, 0, 3, 1]  # positions in the order of their generation
INK, GIVEN, TARGET, FAINT = '#1f2937', '#dbeafe', '#fde68a', '#e5e7eb'


def box(ax, x, y, text, color, width=1.5, height=0.62, weight='normal', size=13):
  ax.add_patch(plt.Rectangle((x - width / 2, y - height / 2), width, height, facecolor=color,
                             edgecolor=INK, linewidth=1.1, zorder=2))
  ax.text(x, y, text, ha='center', va='center', fontsize=size, color=INK, weight=weight, zorder=3)


def arrow(ax, start, end):
  ax.annotate('', xy=end, xytext=start, arrowprops=dict(arrowstyle='-|>', color=INK, lw=1.3))


def draw_items(ax):
  ax.set_xlim(-2.1, 7.5)
  ax.set_ylim(-0.3, 5.75)
  ax.axis('off')
  ax.text(-2.0, 5.3, 'sequence', fontsize=12, color=INK, va='center')
  for position, word in enumerate(WORDS):
    x = 2.05 * position
    step = ORDER.index(position) + 1
    box(ax, x, 5.3, word, FAINT)
    ax.text(x, 4.62, f'position {position}\ngenerated {["", "1st", "2nd", "3rd", "4th"][step]}',
            ha='center', va='center', fontsize=9.5, color=INK)
  rows = ('token', 'its position', 'target')
  for row, name in zip((2.6, 1.95, 1.3), rows):
    ax.text(-2.0, row, name, fontsize=12, color=INK, va='center')
  ax.text(-2.0, 3.62, 'predicts', fontsize=12, color=INK, va='center')
  ax.text(-2.0, 0.2, 'order σ = (2, 0, 3, 1).  Item t knows what was generated before it and the '
          'position\nit must fill; causal attention over the items does the rest.',
          fontsize=11.5, color=INK, va='center')
  for t, target in enumerate(ORDER):
    x = 2.05 * t
    before = ORDER[t - 1] if t else None
    box(ax, x, 2.6, WORDS[before] if t else '[NONE]', GIVEN)
    box(ax, x, 1.95, str(before) if t else '–', GIVEN)
    box(ax, x, 1.3, f'→ {target}', TARGET, weight='bold')
    arrow(ax, (x, 2.95), (x, 3.3))
    box(ax, x, 3.62, WORDS[target], FAINT)


def draw_mask(ax):
  n = len(ORDER)
  ax.set_xlim(-1.9, n)
  ax.set_ylim(-1.2, n + 1.05)
  ax.set_aspect('equal')
  ax.axis('off')
  items = ['[NONE]'] + [WORDS[p] for p in ORDER[:-1]]
  for row in range(n):
    y = n - 1 - row
    ax.text(-0.12, y + 0.5, f'{items[row]} → {ORDER[row]}', ha='right', va='center', fontsize=11.5,
            color=INK)
    for column in range(n):
      ax.add_patch(plt.Rectangle((column, y), 1, 1, edgecolor='white', linewidth=2,
                                 facecolor='#2563eb' if column <= row else FAINT))
  for column in range(n):
    ax.text(column + 0.5, n + 0.12, items[column], ha='center', va='bottom', fontsize=10.5,
            color=INK)
  ax.text(n / 2 - 0.7, -0.35, 'who sees whom: plain causal attention\nin generation order',
          ha='center', va='top', fontsize=11.5, color=INK)


def main():
  figure, (left, right) = plt.subplots(1, 2, figsize=(12.6, 4.6), width_ratios=(2.05, 1))
  draw_items(left)
  draw_mask(right)
  figure.tight_layout()
  figure.savefig(pathlib.Path(__file__).parent / 'idea.png', dpi=110, facecolor='white')


if __name__ == '__main__':
  main()
