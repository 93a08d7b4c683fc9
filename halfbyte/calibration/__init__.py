"""Calibrated quantization: codes and scales chosen from what a little text sends through each layer."""

from halfbyte.calibration.calibrate import calibrate
from halfbyte.calibration.report import CalibratedLayer, CalibrationReport

__all__ = ["CalibratedLayer", "CalibrationReport", "calibrate"]
