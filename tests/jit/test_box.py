"""What NumPy's functions compute is the same in a compiled function, or refused with a line.

The tables have expressions, and statements before an expression, of the arrays in `ARRAYS`; `|`
separates them. Each table is compiled in few programs, because a compilation takes long.
"""

from __future__ import annotations

import functools
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ndistribute as nd
from ndistribute.errors import TracingError

pytest.importorskip("jax")
ml_dtypes = pytest.importorskip("ml_dtypes")

RNG = np.random.default_rng(0)
X, Y, S = RNG.normal(size=(4, 3)), RNG.normal(size=(4, 3)), RNG.normal(size=(3, 3))
N, WHOLE = X.copy(), RNG.integers(-5, 5, (4, 3))
N[[0, 2, 3], [0, 1, 2]] = np.nan, np.nan, np.inf
ARRAYS = {
    "X": X,
    "Y": Y,
    "S": S,
    "N": N,
    "I": WHOLE,
    "T": RNG.normal(size=(2, 3, 4)),
    "P": S @ S.T + 3 * np.eye(3),
    "V": RNG.normal(size=5),
    "F": X.astype(np.float32),
    "B": X > 0,
    "C": X + 1j * Y,
    "D": np.array([3, 1, 3, 2, 1, 3]),
    "H": X.astype(np.float16),
    "Z": np.array(2.5),
    "U": np.abs(WHOLE).astype(np.uint8),
    "J": WHOLE.astype(np.int32),
    "Q": np.abs(WHOLE).astype(np.int8),
}

EQUAL = """
np.mean(X) | np.mean(I,0) | np.mean(F,1,keepdims=True) | np.mean(B) | np.mean(H)
np.mean(X,axis=(0,1)) | np.mean(X,where=X>0) | X.mean(0,dtype=np.float32) | np.sum(X,0)
np.sum(B) | np.sum(J) | np.sum(U) | np.sum(Q,1) | np.sum(X,where=X>0,initial=2.) | np.sum(H)
np.sum(F,dtype=np.float64) | np.prod(U) | np.prod(J,0) | np.prod(B) | np.cumsum(U)
np.cumsum(B,0) | np.cumsum(X,1) | np.cumsum(X) | np.cumprod(J,0) | np.cumprod(X) | np.var(X,0)
np.var(X,ddof=1) | np.var(I) | np.var(F,1) | np.std(X,0,keepdims=True) | np.std(H) | np.std(B)
X.std(axis=1) | np.var(C) | np.median(X,0) | np.median(I) | np.median(N) | np.median(F)
np.percentile(X,30) | np.percentile(X,[10,50],axis=0) | np.quantile(X,.3,axis=1)
np.quantile(F,.3) | np.quantile(I,.3) | np.quantile(X,.3,method="nearest")
np.quantile(X,.3,method="lower") | np.nanmean(N,0) | np.nansum(N) | np.nanmax(N,0) | np.nanmin(N)
np.nanstd(N,1) | np.nanvar(N) | np.nanmedian(N) | np.nanprod(N) | np.nancumsum(N)
np.nanargmax(N) | np.max(X) | np.max(N) | np.min(N,0) | np.max(X,1,initial=0.5)
np.max(X,1,initial=0.5,where=X>0) | np.ptp(X,0) | np.argmax(X) | np.argmax(X,1) | np.argmax(N)
np.argmin(N,0) | np.argmax(B) | np.argmax(D) | np.argmax(X,0,keepdims=True) | np.any(X>1)
np.all(X,0) | np.any(B,1) | np.count_nonzero(B) | np.count_nonzero(X,0) | np.average(X,0)
np.average(X,weights=np.abs(Y)) | np.average(X,0,weights=np.array([1,2,3,4])) | np.where(B,X,Y)
np.where(B,X,0) | np.where(B,F,0) | np.where(B,F,1.5) | np.where(B,U,0)
np.where(B,1,0) | np.where(B,1.,0) | np.where(X,1,0) | np.where(B,F,X) | np.where(B,I,F)
np.where(B,J,F) | np.where(B,H,2.0) | np.where(B,U,Q) | np.select([X>1,X>0],[X,Y],7)
np.select([X>1,X>0],[F,0],7) | np.piecewise(X,[X<0,X>=0],[lambda x:-x,lambda x:x])
np.concatenate([X,Y]) | np.concatenate([X,F],1) | np.concatenate([X,I],axis=1)
np.concatenate([J,F]) | np.concatenate([B,U]) | np.concatenate([X,Y],axis=None)
np.concatenate([X,np.zeros((1,3),np.float32)]) | np.concatenate((F,F),dtype=np.float64)
np.stack([X,Y]) | np.stack([X,F],-1) | np.stack([J,Q]) | np.vstack([X,Y[0]]) | np.hstack([V,V])
np.dstack([X,Y]) | np.column_stack([V,V]) | np.block([[X,Y],[Y,X]]) | np.append(X,Y)
np.append(X,Y,0) | np.append(F,1.5) | np.append(D,1.5) | np.insert(V,2,9.) | np.insert(D,2,9.7)
np.insert(X,1,0,axis=1) | np.delete(V,1) | np.delete(X,[0,2],0) | np.einsum("ij,kj->ik",X,Y)
np.einsum("ij,ij->",X,F) | np.einsum("ij->ji",X) | np.einsum("ii->i",S)
np.einsum("ij,jk,kl",X,S,P) | np.einsum("ij,ij",I,J) | np.einsum("ij,kj",F,J)
np.einsum("ij,kj",B,B) | np.einsum("...i,...i",X,Y,optimize=True) | np.einsum(X,[0,1],Y,[2,1])
np.tensordot(X,T,([1],[1])) | np.tensordot(X,Y) | np.tensordot(X,S,1) | np.tensordot(F,S,1)
np.tensordot(I,J) | np.dot(X,S) | np.dot(V,V) | np.dot(X,2) | np.dot(F,S) | np.dot(J,I.T)
np.dot(U,U.T) | np.dot(B,B.T) | np.dot(T,V[:4]) | np.inner(X,Y) | np.inner(F,I) | np.outer(V,V)
np.outer(V,D) | np.outer(X,Y) | np.outer(F,2.5) | np.kron(X,S) | np.kron(F,I) | np.cross(X,Y)
np.cross(F,X) | np.vdot(X,Y) | np.vdot(C,C) | np.vdot(F,I) | np.matmul(X,S) | np.matmul(F,S)
np.matmul(U,U.T) | np.matmul(B,B.T) | np.matmul(J,I.T) | np.matmul(H,H.T) | np.matmul(T,X)
np.matmul(X[0],S) | np.matmul(S,X[0]) | np.vecdot(C,C) | np.matvec(S,X) | X@S | S@X[0]
np.trace(S) | np.trace(I) | np.trace(U) | np.trace(X,1) | np.diagonal(X) | np.diagonal(X,1)
np.diag(V) | np.diag(S) | np.diag(X,-1) | np.diagflat(X) | np.tril(X) | np.triu(X,1)
np.tril(I,-1) | np.triu(B) | np.clip(X,-.5,.5) | np.clip(X,None,.5) | np.clip(X,0,None)
np.clip(F,0,1) | np.clip(F,0.,1.) | np.clip(U,1,3) | np.clip(U,-1,3) | np.clip(U,0,300)
np.clip(I,.5,2) | np.clip(X,Y,1) | np.clip(F,X,1) | np.clip(I,J,2) | np.clip(X,.5,-.5)
np.clip(N,0,1) | X.clip(0,1) | X.clip(min=0) | X.clip(max=0) | np.clip(X,min=0,max=1)
np.clip(X,a_min=0,a_max=1) | np.sort(X) | np.sort(X,0) | np.sort(X,None) | np.sort(N)
np.sort(N,axis=0) | np.sort(D) | np.sort(B,1) | np.sort(C) | np.argsort(D)
np.argsort(D,kind="stable") | np.argsort(X,0) | np.argsort(N,1) | np.argsort(X,None)
np.sort(D,kind="stable") | np.partition(V,2)[2] | np.argpartition(V,2)[2]
np.lexsort((D,D[::-1])) | np.searchsorted(np.sort(V),X)
np.searchsorted(np.sort(V),0.1,side="right") | np.searchsorted(np.sort(D),[1,2,3])
np.digitize(X,np.array([-1,0,1.])) | np.histogram(X,3) | np.histogram(X,np.array([-1,0,1.]))
np.interp(X,np.arange(5.),V) | np.take(X,1,0) | np.take(X,[0,2],1) | np.take(X,D) | np.take(X,D,0)
np.take(X,[0,-1]) | np.take(X,[[0,1],[2,3]],axis=0) | np.take(X,[5,-7],axis=0,mode="clip")
np.take(X,[5,-7],axis=0,mode="wrap") | X.take(1) | X.take([1,2],axis=1)
np.take_along_axis(X,np.argsort(X,1),1) | np.take_along_axis(X,np.array([[0,1,2]]),0)
np.take_along_axis(X,np.argmax(X,1,keepdims=True),1) | np.pad(X,1)
np.pad(X,((1,0),(0,2)),constant_values=3) | np.pad(X,1,mode="edge") | np.pad(X,1,mode="reflect")
np.pad(X,1,mode="wrap") | np.pad(X,1,mode="symmetric")
np.pad(I,1,mode="constant",constant_values=2.7) | np.pad(X,1,mode="mean")
np.pad(X,2,mode="linear_ramp") | np.pad(I,1,mode="mean") | np.diff(X) | np.diff(X,axis=0)
np.diff(X,2) | np.diff(U) | np.diff(B) | np.diff(X,prepend=0.) | np.diff(D,append=7)
np.ediff1d(V) | np.ediff1d(D,to_begin=1) | np.gradient(V) | np.gradient(X) | np.gradient(X,axis=0)
np.gradient(I,axis=0) | np.gradient(V,2.) | np.trapezoid(V) | np.trapezoid(X,dx=.5,axis=0)
np.convolve(V,V) | np.convolve(V,V,"same") | np.convolve(D,V) | np.correlate(V,V)
np.correlate(V,D,"full") | np.cov(X) | np.cov(X,rowvar=False) | np.corrcoef(X)
np.polyval([1,2,3],X) | np.polyval(V,2.) | np.polyfit(np.arange(5.),V,2) | np.vander(V)
np.vander(V,3,increasing=True) | np.poly(V) | np.roots([1.,2.,3.]) | np.polyadd(V,D)
np.polymul(V,V) | np.repeat(X,2) | np.repeat(X,2,0) | np.repeat(X,[1,2,3],axis=1)
np.repeat(X,[1,0,3,2],axis=0) | np.tile(X,2) | np.tile(X,(2,1)) | np.roll(X,1) | np.roll(X,1,0)
np.roll(X,(1,2),(0,1)) | np.flip(X) | np.flip(X,0) | np.fliplr(X) | np.flipud(X) | np.rot90(X)
np.rot90(X,k=3) | np.reshape(X,(3,4)) | np.reshape(X,(2,-1)) | np.reshape(X,-1,order="F")
np.reshape(X,(3,4),order="F") | X.reshape(3,4) | X.reshape((-1,)) | X.reshape(3,-1,order="F")
np.ravel(X) | np.ravel(X,order="F") | np.ravel(X,"F") | X.ravel("F") | X.flatten()
X.flatten("F") | np.transpose(T) | np.transpose(T,(1,0,2)) | T.transpose(2,0,1)
T.transpose(-1,0,1) | np.transpose(T,axes=(0,-1,1)) | T.T | T.mT | np.matrix_transpose(T)
np.permute_dims(T,(1,0,2)) | np.swapaxes(T,0,-1) | np.moveaxis(T,0,-1)
np.moveaxis(T,[0,1],[-1,0]) | np.rollaxis(T,2) | np.squeeze(X[None]) | np.squeeze(X[None],0)
np.expand_dims(X,0) | np.expand_dims(X,(0,-1)) | np.atleast_1d(Z) | np.atleast_2d(V)
np.atleast_3d(X) | np.atleast_1d(V,Z) | np.broadcast_to(X,(2,4,3)) | np.broadcast_to(Z,(2,2))
np.broadcast_arrays(X,Y[0]) | np.meshgrid(V,D) | np.meshgrid(V,D,indexing="ij")
np.meshgrid(V,D,sparse=True) | np.split(X,2) | np.split(X,[1,3]) | np.split(X,3,axis=1)
np.array_split(X,3) | np.hsplit(X,3) | np.vsplit(X,2) | np.dsplit(T,2) | np.unstack(X)
np.zeros_like(X) | np.ones_like(I) | np.full_like(X,3) | np.full_like(I,3.7) | np.full_like(I,7)
np.zeros_like(X,dtype=np.float32) | np.zeros_like(X,shape=(2,2)) | np.empty_like(X).shape
np.empty_like(X)*0 | np.zeros_like(I,dtype=bool) | np.copy(X) | X.copy() | np.round(X)
np.round(X,1) | np.round(X*100,-1) | np.round(I) | np.round(F,2) | np.around(X,2) | X.round(1)
np.round(np.array([.5,1.5,2.5]),0)+V[:3]*0 | np.rint(V*2) | np.fix(X) | np.trunc(X) | np.real(C)
np.imag(C) | np.real(X) | np.imag(X) | C.real | C.imag | np.angle(C) | np.angle(X) | np.conj(C)
np.abs(C) | np.iscomplexobj(C) | np.isrealobj(X) | np.iscomplex(C) | np.isreal(X)
np.isclose(X,X+1e-9) | np.allclose(X,X) | np.array_equal(X,X) | np.array_equal(X,Y)
np.array_equal(X,V) | np.array_equiv(X,X) | np.isposinf(N) | np.isneginf(N) | np.nan_to_num(N)
np.nan_to_num(N,nan=1.,posinf=9.) | np.nan_to_num(I) | np.sinc(X) | np.i0(X) | np.unwrap(V*5)
np.deg2rad(X) | np.hypot(X,Y) | np.fft.fft(V) | np.fft.ifft(V) | np.fft.rfft(V) | np.fft.fft2(X)
np.fft.fftshift(V) | np.fft.irfft(C[0]) | np.fft.fft(F) | np.fft.rfft(F) | np.linalg.norm(X)
np.linalg.norm(X,axis=0) | np.linalg.norm(X,1) | np.linalg.norm(X,2) | np.linalg.norm(X,"nuc")
np.linalg.norm(X,np.inf) | np.linalg.norm(I) | np.linalg.norm(F,axis=1,keepdims=True)
np.linalg.norm(X,3,axis=1) | np.linalg.inv(P) | np.linalg.inv(P.astype(np.float32))
np.linalg.det(P) | np.linalg.slogdet(P) | np.linalg.slogdet(P)[1] | np.linalg.slogdet(P).logabsdet
np.linalg.solve(P,X.T) | np.linalg.solve(P,X[0]) | np.linalg.solve(P,F.T) | np.linalg.cholesky(P)
np.linalg.eigvalsh(P) | np.linalg.eigh(P)[0] | np.abs(np.linalg.eigh(P)[1])
np.linalg.eigh(P).eigenvalues | np.linalg.svd(X)[1] | np.linalg.svd(X,compute_uv=False)
np.linalg.svd(X,full_matrices=False)[1] | np.linalg.svdvals(X) | np.abs(np.linalg.qr(X)[1])
np.linalg.qr(X,mode="r") | np.linalg.matrix_power(S,3) | np.linalg.matrix_power(S,-2)
np.linalg.matrix_rank(S) | np.linalg.pinv(X) | np.linalg.lstsq(X,Y,rcond=None)[0]
np.linalg.cond(P) | np.linalg.multi_dot([X,S,P]) | np.linalg.tensorinv(P.reshape(3,3),1)
np.linalg.inv(I[:3]) | np.linalg.det(I[:3]) | np.linalg.vector_norm(X) | np.linalg.matrix_norm(X)
np.linalg.outer(V,V) | np.linalg.cross(X,Y) | np.linalg.trace(S) | np.linalg.diagonal(S)
np.linalg.vecdot(X,Y) | np.linalg.matmul(X,S) | np.linalg.matrix_transpose(X) | np.isin(D,[1,3])
np.apply_along_axis(np.sum,0,X) | np.fromfunction(lambda i,j:i+j,(2,2))+X[:2,:2]
np.ix_(D[:2],D[:3]) | np.indices((2,2))+I[:2,:2] | np.unravel_index(D,(3,4)) | np.packbits(B)
np.unpackbits(U) | np.astype(X,np.float32) | np.astype(X,int) | X.astype(int)
(X*100).astype(np.uint8) | (X*300).astype(np.int8) | (I*100).astype(np.int8) | X.astype(bool)
X.astype("float16") | C.astype(np.complex64) | C.astype(bool) | X.astype(complex) | np.shape(X)
np.ndim(X) | np.size(X) | np.size(X,1) | np.can_cast(X.dtype,np.float32) | np.dtype(X.dtype).name
np.issubdtype(X.dtype,np.floating) | np.finfo(F.dtype).eps*F | np.isscalar(X) | np.iterable(X)
np.add.reduce(X) | np.add.reduce(X,axis=None) | np.add.reduce(U)
np.add.reduce(X,axis=1,keepdims=True) | np.add.reduce(B) | np.multiply.reduce(X,1)
np.maximum.reduce(X) | np.minimum.reduce(X,axis=(0,1)) | np.logical_and.reduce(B)
np.logical_or.reduce(X>2,axis=1) | np.bitwise_or.reduce(I) | np.bitwise_xor.reduce(J,axis=1)
np.subtract.reduce(X) | np.logaddexp.reduce(X) | np.logaddexp.reduce(X,axis=1)
np.add.accumulate(X) | np.add.accumulate(U) | np.multiply.accumulate(X,1)
np.maximum.accumulate(X) | np.minimum.accumulate(X,axis=1) | np.subtract.accumulate(V)
np.add.outer(V,D) | np.multiply.outer(X,F) | np.subtract.outer(V,2) | np.equal.outer(D,D)
np.add.reduceat(V,[0,2]) | np.maximum.outer(V,V) | np.add.reduce(X,dtype=np.float32)
np.add.reduce(X,initial=10) | np.add.reduce(X,where=B) | np.maximum.reduce(X,where=B,initial=-1)
np.mean(U) | np.mean(Q,0) | np.var(J) | np.multiply.outer(F,2.5) | X**2 | B**2 | Z**2
np.sum(X.T,0) | U+2 | U-3 | U*100 | np.floor_divide(I,I-1) | I//U | I%0 | J//0 | np.divmod(I,I-1)
X[np.array([True,False,True,False])] | X[np.array([True,False,True,False]),1]
X[[True,False,True,False]] | X[1] | X[-1] | X[D] | X[D,D%3] | X[:,D%3] | X[...,D%3] | X[D%3,None]
X[1:3,D%3] | X[np.int64(1)] | X[D[0]] | X[None,1] | X[...,1] | X[()] | X[[]] | X[:0] | X[10:]
X[::-1] | X[np.ix_([0,1],[0,2])] | Z[()] | Z[...] | Z+1 | V[D] | np.modf(X) | np.linalg.norm(X-1)
list(X)[0] | [r.sum() for r in X] | len(X) | X.size | X.shape | X.ndim | X.itemsize | X.nbytes
X.dtype == np.float64 | sum(V) | abs(X) | -X | +X | ~B | ~I | divmod(I,3) | pow(X,2) | X<Y
(X<Y)&B | X==Y | X!=0 | [1,2,3]*X[0] | [1.,2,3]+X | X+[1,2,3] | (1,2,3)+X | np.float64(2)*F
np.float32(2)*X | np.array(2.)*F | np.float64(2)*H | 2*H | np.int64(1)+Q | 1+Q | 1.5+Q | True+Q
Q+True | np.sqrt(2)*F | np.pi*F | np.log(10)*F | F.sum()/len(F) | F.mean()*2 | F*F.sum()
F/F.size | F/np.size(F) | X.var(ddof=1) | X.argmax() | X.argmax(1) | X.any() | X.all(0)
X.cumsum() | X.cumprod(1) | X.prod() | X.max(1,keepdims=True) | X.min() | X.trace() | X.diagonal()
X.repeat(2) | X.repeat(2,axis=1) | X.swapaxes(0,1) | X.dot(S) | X.conj() | X.round()
X.mean(axis=0) | D.argsort() | X.take(D) | np.ones(3)*X | np.arange(3)*X | np.linspace(0,1,3)*X
np.random.default_rng(0).normal(size=3)*X | np.isnan(X).any() | np.logical_and(B,X)
np.logical_not(X) | np.bitwise_count(I) | np.left_shift(J,2) | np.ldexp(X,I) | np.nextafter(X,Y)
np.spacing(X) | np.gcd(I,J) | np.lcm(I,J) | np.heaviside(X,.5) | np.signbit(X)
np.float_power(F,2) | np.cbrt(X) | np.sign(N) | np.sign(C) | np.exp2(X) | np.power(I,2)
np.power(I,2.) | np.power(F,2) | np.power(2,J%3) | np.power(2.,J)
"""
WRITES = """
X+2.5 | o=np.zeros_like(X); np.add(X,Y,out=o,where=B); o
o=np.zeros_like(X); np.add(X,Y,out=o); o | o=np.zeros_like(F); np.add(X,Y,out=o); o
o=np.zeros_like(X); q=np.matmul(X,S,out=o); q+=1; o | o=X.copy(); o+=1; o*=Y; o-=.5; o/=2; o
o=I.copy(); o+=1; o//=2; o%=3; o | o=F.copy(); o+=X; o | o=U.copy(); o+=1; o
o=U.copy(); o[0]=2.9; o | o=X.copy(); o[0]=9; o | o=X.copy(); o[:,1]=Y[:,0]; o
o=X.copy(); o[1:3][0]=7; o | o=X.copy(); o[1:3]+=Y[:2]; o | o=X.copy(); v=o[::-1]; v[0]=5; o
o=X.copy(); v=o.T; v[0]=5; o | o=X.copy(); v=o.T[1:]; v*=2; o
o=X.copy(); v=o.reshape(-1); v[3:5]=5; o | o=X.copy(); v=o.reshape(2,6)[:,::2]; v+=1; o
o=X.copy(); v=o.T.reshape(-1); v[3:5]=5; o | o=X.copy(); v=o.T.ravel(); v[3:5]=5; o
o=X.copy(); v=o.ravel(); v[3:5]=5; o | o=X.copy(); v=o.flatten(); v[3:5]=5; o
o=X.copy(); v=o[:,1:].reshape(-1); v[3:5]=5; o | o=X.copy(); v=o[1:].reshape(-1); v[3:5]=5; o
o=X.copy(); v=o.T.T.reshape(-1); v[3]=5; o | o=X.copy(); v=(o.T*1).T.reshape(-1); v[3]=5; o
y=X.T*1; v=y.reshape(-1); v[3]=5; y | y=X.T*Y.T; v=y.reshape(-1); v[3]=5; y
y=X.T+1.; v=y.T.reshape(-1); v[3]=5; y | y=X.T.copy(); v=y.reshape(-1); v[3]=5; y
y=np.copy(X.T); v=y.reshape(-1); v[3]=5; y | y=np.zeros_like(X.T); v=y.reshape(-1); v[3]=5; y
y=X.T.astype(np.float32); v=y.reshape(-1); v[3]=5; y
y=np.where(X.T>0,X.T,0); v=y.reshape(-1); v[3]=5; y | y=X.T@Y; v=y.reshape(-1); v[3]=5; y
y=np.clip(X.T,0,1); v=y.reshape(-1); v[3]=5; y | y=np.sort(X.T,0); v=y.reshape(-1); v[3]=5; y
y=np.maximum(X.T,0.); v=y.reshape(-1); v[3]=5; y | o=X.copy(); v=o.T; o[0]=9; v
o=X.copy(); v=o[0]; o[0]=9; v | o=X.copy(); v=o[[0,1]]; v[0]=9; o
o=X.copy(); v=o[[0,1]]; o[0]=9; v | o=X.copy(); v=o.astype(np.float64); v[0]=1; o
o=X.copy(); v=o.astype(np.float64,copy=False); v[0]=1; o | o=X.copy(); v=o.squeeze(); v[0]=1; o
o=X[None].copy(); v=np.squeeze(o,0); v[0]=1; o | o=X.copy(); v=np.swapaxes(o,0,1); v[0]=1; o
o=T.copy(); v=np.moveaxis(o,0,-1); v[0]=1; o | o=T.copy(); v=np.rollaxis(o,2); v[0]=1; v*=2; o
o=T.copy(); v=o.transpose(1,2,0); v+=np.arange(24.).reshape(3,4,2); o
o=X.copy(); v=o[:,None]; v[0]=1; o | o=X.copy(); v=np.expand_dims(o,0); v[0,1]=1; o
o=X.copy(); o.flat[3]=9; o | o=X.copy(); o.flat=9; o | o=X.copy(); o.T.flat[3]=9; o
o=X.copy(); o.flat[[1,3]]=9; o | o=C.copy(); o.real[0]=9; o | o=C.copy(); o.imag[0]=9; o
o=C.copy(); o.real=1; o.imag*=2; o | o=X.copy(); o.real[0]=9; o
o=X.copy(); a,b=np.split(o,2); a[0]=1; b+=1; o | o=X.copy(); a,b=np.vsplit(o,2); a[0]=1; b+=1; o
o=X.copy(); a,b,c=np.hsplit(o,3); a[0]=1; b+=1; o
o=X.copy(); a,b,c=np.array_split(o,3); a[0]=1; b+=1; o | o=X.copy(); a=np.unstack(o)[0]; a[0]=1; o
o=X.copy(); v=np.flip(o); v[0]=1; o | o=X.copy(); v=np.flipud(o); v[0]=1; o
o=X.copy(); v=np.rot90(o); v[0]=1; v[1,1]=3; o | o=X.copy(); v=np.flip(o,1); v[0]=Y[0]; o
o=X.copy(); v=np.diagonal(o); o[:]=1; v | o=X.copy(); v=np.diag(o); o[:]=1; v
o=V.copy(); v=np.diag(o); o[:]=1; v | o=V.copy(); v=np.diag(o); v[0]=7; o
o=V.copy(); v=np.broadcast_to(o,(2,5)); o[0]=1; v | o=V.copy(); v=np.atleast_2d(o); v[0,1]=1; o
o=X.copy(); v=o.view(); v[0]=1; o | o=X.copy(); v=o[...]; v[0]=1; o | o=X.copy(); v=o[:]; v+=1; o
o=X.copy(); o[B]=0; o | o=X.copy(); o[o>0]=-1; o | o=X.copy(); o[B]=V[0]; o
o=X.copy(); o[B[:,0]]=Y[0]; o | o=X.copy(); o[np.array([True,False,True,False])]=0; o
o=V.copy(); o[[0,0,1]]=[1,2,3]; o | o=V.copy(); o[D]=np.arange(6.); o | o=V.copy(); o[D]+=1; o
o=V.copy(); np.add.at(o,D,1); o | o=V.copy(); np.add.at(o,D,np.arange(6)); o
o=V.copy(); np.subtract.at(o,D,1); o | o=V.copy(); np.multiply.at(o,D,2); o
o=V.copy(); np.divide.at(o,D,2); o | o=V.copy(); np.maximum.at(o,D,.1); o
o=V.copy(); np.add.at(o,[0,0],1); o | o=X.copy(); np.add.at(o,(D,D%3),1); o
o=X.copy(); np.add.at(o,D,Y[0]); o | o=F.copy(); np.add.at(o,0,1.5); o
o=F.copy(); np.add.at(o,0,X[0]); o | o=X.copy(); np.copyto(o,Y); o
o=X.copy(); np.copyto(o,Y,where=B); o | o=I.copy(); np.copyto(o,X,casting="unsafe"); o
o=X.copy(); np.copyto(o,2); o | o=X.copy(); np.putmask(o,B,0); o
o=X.copy(); np.putmask(o,B,Y); o | o=X.copy(); np.putmask(o,B,V); o
o=X.copy(); np.put(o,[0,5],9); o | o=X.copy(); np.put(o,[0,5],[1,2]); o
o=X.copy(); np.put(o,[0,50],[1,2],mode="clip"); o | o=X.copy(); np.put(o,D,9); o
o=X.copy(); np.put_along_axis(o,np.argmax(X,1,keepdims=True),9,1); o
o=S.copy(); np.fill_diagonal(o,1); o | o=X.copy(); np.fill_diagonal(o,1); o
o=X.copy(); np.fill_diagonal(o,V[:3]); o | o=X.copy(); o.fill(3); o | o=X.copy(); o.sort(); o
o=X.copy(); o.sort(0); o | o=X.copy(); np.clip(o,0,1,out=o); o | o=X.copy(); o.clip(0,1,out=o); o
o=X.copy(); np.round(o,1,out=o); o | o=X.copy(); np.cumsum(X,1,out=o); o
o=X.copy(); np.exp(o,o); o | o=X.copy(); np.sum(Y,0,out=o[0]); o | a,b=np.frexp(X); a*2.0**b
"""
REFUSED = """
np.sum([X,Y],0) | np.choose(U%2,[X,Y]) | np.bincount(D) | np.bincount(D,minlength=5)
np.compress([True,False,True,False],X,0) | np.extract(X>0,X) | np.round(I*10+5,-1)
np.real_if_close(X) | np.linalg.eigvals(P) | np.linalg.eig(P)[0] | np.nonzero(X) | np.unique(D)
np.flatnonzero(D) | np.argwhere(D) | np.setdiff1d(D,[1]) | np.union1d(D,[1])
np.vectorize(lambda x:x+1)(X) | np.ravel_multi_index((D%2,D%2),(3,4)) | np.common_type(X,F)
np.shares_memory(X,X) | np.maximum.reduce([X,Y]) | np.divide.reduce(X) | np.power.reduce(V)
np.hypot.reduce(X) | np.fmax.reduce(N) | np.add(X,Y,where=B) | o=X.copy(); v=o[B]; o
o=X.copy(); v=np.asarray(o); o | o=X.copy(); o[o>0]*=2; o | o=X.copy(); o[B[:,0],1]=0; o | X[B]
X[B[:,0]] | X[True] | o=V.copy(); np.negative.at(o,D); o | o=V.copy(); np.power.at(o,D,2); o
o=I.copy(); np.add.at(o,0,1.5); o | o=I.copy(); np.divide.at(o,0,2); o
o=X.copy(); np.place(o,B,V); o | o=X.copy(); np.nan_to_num(o,copy=False); o
o=np.zeros(3); np.sum(X,0,out=o); o | X.item(0) | X.tolist() | float(Z) | int(Z) | bool(Z)
complex(Z) | Z in [1] | 2.5 in V | max(V) | min(V) | np.array([X[0,0],1.]) | np.array([X[0],Y[0]])
np.asarray([V[0],V[1]]) | np.array(X) | np.float32(X[0,0]) | X.nonzero()
X.compress([True,False,True,False],0)
"""
MISTAKES = """
np.take(X,5,axis=0) | np.take(X,99) | np.take_along_axis(X,np.array([[0,9,2]]),0)
np.squeeze(X,0) | np.split(X,3) | U+300 | o=np.zeros_like(I); np.add(X,Y,out=o); o
o=I.copy(); o+=1.5; o | o=I.copy(); o/=2; o | o=U.copy(); o[0,0]=300; o | o=U.copy(); o[0]=-1; o
o=X.copy(); o.imag[0]=9; o | o=X.copy(); v=np.diagonal(o); v[0]=1; o
o=V.copy(); v=np.broadcast_to(o,(2,5)); v[0]=1; o | o=X.copy(); o[B[:,0]]=Y; o | X[7] | X[-5]
X[0,5] | X[[0,7]] | X[[-5]] | X[1.5] | X["a"] | X[0,0,0] | o=I.copy(); np.copyto(o,X); o
o=X.copy(); np.put(o,[0,50],[1,2]); o
o=X.copy(); np.put_along_axis(o,np.array([[0,9,2]]),9,0); o | round(Z,1) | not B | X and Y
"""


def cases(table, file="<table>"):
    """Return the functions of a table, each with the values of its arguments."""
    made = []
    for k, text in enumerate(re.split(r" \| |\n", table.strip())):
        names = [name for name in ARRAYS if re.search(rf"\b{name}\b", text)]
        *before, last = text.split("; ")
        lines = [f"def f({', '.join(names)}):", *before, f"return {last}"]
        scope = {"np": np}
        exec(compile("\n ".join(lines), f"{file}:{k}", "exec"), scope)
        made.append((text, scope["f"], [ARRAYS[name] for name in names]))
    return made


def copies(arguments):
    return [np.array(value) if isinstance(value, np.ndarray) else value for value in arguments]


def check_equal(table):
    """Compare results, shapes and dtypes of plain calls and of those of one program."""

    @nd.function
    def compiled(arguments):
        with np.errstate(all="ignore"):
            return [f(*args) for (_, f, _), args in zip(table, arguments, strict=True)]

    results = compiled([copies(args) for _, _, args in table])
    different = []
    for (text, f, args), result in zip(table, results, strict=True):
        with np.errstate(all="ignore"):
            expected = f(*copies(args))
        try:
            check_same(result, expected)
        except AssertionError as error:
            different.append(f"{text}: {error}")
    assert not different, "\n".join(different)


def check_same(result, expected):
    if isinstance(expected, list | tuple):
        assert len(result) == len(expected)
        for part, other in zip(result, expected, strict=True):
            check_same(part, other)
        return
    result, expected = np.asarray(result), np.asarray(expected)
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    if expected.dtype.kind in "fcV":
        precise = {2: 4e-3, 4: 2e-6}.get(expected.real.dtype.itemsize, 2e-13)
        if expected.dtype.kind == "V":
            precise, result, expected = 2e-2, result.astype(float), expected.astype(float)
        np.testing.assert_allclose(result, expected, precise, precise)
    else:
        np.testing.assert_array_equal(result, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("part", range(4))
def test_functions_compute_what_they_compute_plainly(part):
    check_equal(cases(EQUAL)[part::4])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_writes_reach_views_and_not_copies():
    check_equal(cases(WRITES))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_compiled_says_where():
    table, errors = cases(REFUSED, "<refused>"), {}

    @nd.function
    def compiled(arguments):
        for (text, f, _), args in zip(table, arguments, strict=True):
            try:
                errors[text] = str(f(*args))
            except TracingError as error:
                errors[text] = str(error)

    compiled([copies(args) for _, _, args in table])
    unnamed = [t for k, (t, _, _) in enumerate(table) if f"<refused>:{k}:" not in errors[t]]
    assert unnamed == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mistakes_raise_as_plainly():
    table, wrong = cases(MISTAKES), []
    plain = {}
    for text, f, args in table:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            f(*copies(args))
        plain[text] = caught.type

    @nd.function
    def compiled(arguments):
        for (text, f, _), args in zip(table, arguments, strict=True):
            with pytest.raises(Exception) as caught:  # noqa: PT011
                f(*args)
            known = (TracingError, TypeError) if plain[text] is IndexError else (TracingError,)
            if not issubclass(plain[text], caught.type) and not issubclass(caught.type, known):
                wrong.append(f"{text}: {plain[text]} and {caught.type}")

    compiled([copies(args) for _, _, args in table])
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "X[D + 1]",
        "X[D - 8]",
        "X[D[0] + 7]",
        "X[:, D]",
        "np.take(X, D + 9, axis=0)",
        "np.take(X, D + 10)",
        "np.take_along_axis(X, D[None, :3], 1)",
        "o = X.copy(); np.add.at(o, D + 9, 1); o",
        "o = X.copy(); o[D + 1] = 3; o",
        "o = X.copy(); np.put(o, D * 9, 3); o",
        "np.linalg.inv(S * 0)",
        "np.linalg.solve(S * 0, S)",
        "np.linalg.cholesky(S - 5 * np.eye(3))",
    ],
)
def test_errors_that_values_decide_are_raised_when_the_program_has_run(text):
    ((_, f, args),) = cases(text, "<mistake>")
    with pytest.raises((IndexError, np.linalg.LinAlgError)) as plain:
        f(*copies(args))
    with pytest.raises(plain.type, match="<mistake>"):
        nd.function(f)(*copies(args))


DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint64 float16 float32 float64 complex64"
DTYPES = [*map(np.dtype, [*DTYPES.split(), "complex128", ml_dtypes.bfloat16])]
UFUNCS = [u for n in sorted(np.__all__) if isinstance(u := getattr(np, n), np.ufunc)]
UFUNCS = [u for u in UFUNCS if u.signature is None]


def numbers(values, dtype):
    values = np.array(values) * (1 if dtype.kind in "fcVb" else 2)
    return (np.abs(values) if dtype.kind == "u" else values).astype(dtype)


def ufunc_cases(first, second, dtypes):
    """Return calls of all ufuncs, each for some of the dtypes."""
    for k, ufunc in enumerate(UFUNCS):
        for dtype in dtypes[k % 4 :: 4]:
            args = [numbers(first, dtype), numbers(second, dtype)][: ufunc.nin]
            try:
                with np.errstate(all="ignore"):
                    ufunc(*args)
            except (TypeError, ValueError):
                continue
            if ufunc is not np.reciprocal or dtype.kind not in "iu":
                yield f"{ufunc.__name__} {dtype}", ufunc, args


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ufuncs_compute_what_they_compute_plainly():
    check_equal(list(ufunc_cases([1.5, -0.5, 0.25, 3], [2, 1.0, -1, 0.75], DTYPES)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ufuncs_compute_with_what_is_no_number_and_with_zero_as_plainly():
    dtypes = [np.dtype(name) for name in ("float64", "float32", "int64", "uint8")]
    edges = [0.0, -0.0, 1.0, -1.0, 2.5, np.nan, np.inf, -np.inf]
    pairs = list(itertools.product(edges, edges))
    floats = list(ufunc_cases(*np.transpose(pairs), dtypes[:2]))
    pairs = list(itertools.product([0, 1, -1, 3, -4], [0, 1, -1, 3, -2]))
    skipped = ("power", "pow")  # Of negative integers.
    whole = [c for c in ufunc_cases(*np.transpose(pairs), dtypes[2:]) if c[0] not in skipped]
    check_equal(floats)
    check_equal(whole)


OPERATIONS = {
    "+": lambda x, y: x + y,
    "/": lambda x, y: x / y,
    "//": lambda x, y: y // x,
    "**": lambda x, y: x**y,
    "maximum": np.maximum,
    "where": lambda x, y: np.where(x > 1, x, y),
    "hypot": np.hypot,
    "&": lambda x, y: x & y,
}
OPERANDS = [np.dtype(name) for name in "bool int8 int64 uint8 float16 float32 float64".split()]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numbers_and_arrays_of_other_dtypes_give_the_dtypes_of_numpy():
    table = []
    pairs = itertools.product(enumerate(OPERANDS), enumerate(OPERANDS))
    for (name, f), ((i, a), (j, b)) in itertools.product(OPERATIONS.items(), pairs):
        x = np.array([1, 2, 3]).astype(a)
        if (i + j) % 2:
            table.append((f"{name} {a} {b}", f, [x, np.array([[2], [1]]).astype(b)]))
        else:
            table.append((f"{name} {a} 0-d {b}", f, [x, np.array(2).astype(b)]))
    for (name, f), number, dtype in itertools.product(OPERATIONS.items(), (True, 2, 2.5), OPERANDS):
        known = functools.partial(_reversed, f, number)
        table.append((f"{name} {number} {dtype}", known, [np.ones((2,) * (number != 2), dtype)]))
    kept = []
    for case in table:
        try:
            case[1](*case[2])
        except TypeError:
            continue
        kept.append(case)
    check_equal(kept)


def _reversed(f, number, x):
    return f(x, number)


VIEWS = {
    "slice": lambda x: x[1:] if len(x) > 1 else x,
    "step": lambda x: x[..., ::-2],
    "row": lambda x: x[-1] if x.ndim > 1 else x,
    "new axis": lambda x: x[:, None],
    "transpose": lambda x: x.T,
    "swap": lambda x: np.swapaxes(x, 0, -1),
    "flat": lambda x: x.reshape(-1),
    "ravel": np.ravel,
    "fortran": lambda x: x.reshape(-1, order="F"),
    "two": lambda x: x.reshape(2, -1) if x.size % 2 == 0 else x,
    "squeeze": lambda x: np.squeeze(x) if x.size > 1 else x,
    "flip": lambda x: np.flip(x, 0),
    "part": lambda x: np.array_split(x, 2, axis=-1)[0],
    "copy": lambda x: x.copy(),
    "like": lambda x: x * 1.0,
    "cast": lambda x: x.astype(np.float64),
    "gather": lambda x: x[[0, -1]],
    "atleast": np.atleast_2d,
}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(sorted(VIEWS)), min_size=1, max_size=5), st.booleans())
def test_a_write_to_a_view_of_a_view_changes_what_it_changes_in_numpy(names, to_base):
    def write(x):
        x, made = x.copy(), []
        view = x
        for name in names:
            view = VIEWS[name](view)
            made.append(view)
        for k, each in enumerate([x] if to_base else made):
            np.multiply(each, 2, out=each)
            each[:1] += k
            each[...] = each - 0.5
        return [x, *made]

    x = np.arange(24.0).reshape(4, 6)
    check_same(nd.function(write)(x), write(x))


def test_what_is_given_back_has_seen_what_was_written_after_it_was_made():
    def views(x):
        x = x.copy()
        row, turned = x[0], x.T
        x[0] = 9
        return {"row": row, "turned": (turned, turned[1])}

    result, expected = nd.function(views)(X), views(X)
    check_same(result["row"], expected["row"])
    check_same(result["turned"], expected["turned"])


@pytest.mark.parametrize("part", [np.s_[:], np.s_[1:]])
def test_a_write_to_what_may_be_a_copy_or_a_view_is_refused(part):
    def ambiguous(x):
        total = np.sum(x.T, 0)[part].reshape(-1)
        total[0] = 1
        return total

    with pytest.raises(ValueError, match="copy it first"):
        nd.function(ambiguous)(ARRAYS["T"])
