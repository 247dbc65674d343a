"""Sweeps that survive: `python train.py -m ...`, started again, goes on where it stands.

grid.py names the sweep's folder and its jobs by their overrides and keeps the list of jobs; processes.py runs jobs as
processes of this machine; status.py tells from the files alone how far each job is. The classes that Hydra calls are in
hydra_plugins/selmodel_sweep.py.
"""
