"""Plans of several pipelines: bound, shares and what is found, against plans drawn at random."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from search_jobs import island, job, model

from hetplan.cluster.spec import Cluster, Link, Transport
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.chosen import ChosenPipeline, ChosenPlan, ChosenStage, Part, Shape
from hetplan.plans.plan import RecomputeGranularity, Schedule, Sharding
from hetplan.search.costs.maker import SpaceMaker
from hetplan.search.several.assembling import Assembler
from hetplan.search.several.shares import Share, balanced
from hetplan.search.several.solver import SeveralSolver
from hetplan.search.solver import Best
