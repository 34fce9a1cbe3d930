# A language that the base never heard, with a replay of those it knows: docs/new_language.md is the recipe.
#   finetune.py config/finetune.py config/finetune_wide.py config/finetune_language.py
data = 'data/language'          # sources of the new language, and max_rows of the old ones
out_dir = 'out/language'
val_corpora = {'old': 'data/corpus'}    # held-out rows of the old languages: what is forgotten shows here
learning_rate = 2e-4            # there is more to learn than with a language it knows
epochs = 3
short_fraction = 0.3            # long rows are where a new language is learned
